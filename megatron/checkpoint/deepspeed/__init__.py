"""Read DeepSpeed's checkpoints, as saved by Megatron-DeepSpeed, without running code from them.

A folder `global_step100` contains files written by torch.save. T is the model-parallel rank
(stage x tensor-parallel size + tensor rank), D the data-parallel rank:

    mp_rank_TT_model_states.pt                     weights, command line, schedule, counters
    zero_pp_rank_D_mp_rank_TT_model_states.pt      the same with ZeRO 3, without weights
    layer_NN-model_TT-model_states.pt              weights of a layer of a PipelineModule; here, T
                                                   is the tensor rank
    layer_L_expert_E_mp_rank_TT_model_states.pt    weights of an expert
    [bf16_]zero_pp_rank_D_mp_rank_TT_optim_states.pt   a process's shard of the optimizer states
    expp_rank_D_mp_rank_TT_optim_states.pt         optimizer states of a mixture without ZeRO

Modules:
    files      the files in a folder, opened and sorted by kind
    names      DeepSpeed's parameter names and native names
    states     which elements of which flat partition belong to which parameter
    arguments  Megatron-DeepSpeed's command line, converted to our settings
    reader     such a folder through the `Reader` interface
"""
