"""Schedulers in DeepSpeed's JSON file, each with the values that it sets."""

from __future__ import annotations

from typing import Any

SCHEDULES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {
                    "warmup_min_lr": 1e-5,
                    "warmup_max_lr": 1e-3,
                    "warmup_num_steps": 4,
                    "total_num_steps": 30,
                    "warmup_type": "linear",
                },
            }
        },
        {"schedule.lr": 1e-3, "schedule.lr_warmup_init": 1e-5, "schedule.lr_warmup_iters": 4}
        | {"schedule.lr_decay_style": "linear", "schedule.lr_decay_iters": 30}
        | {"schedule.min_lr": 1e-5},
    ),
    (
        {
            "scheduler": {
                "type": "LRRangeTest",
                "params": {
                    "lr_range_test_min_lr": 1e-4,
                    "lr_range_test_step_size": 20,
                    "lr_range_test_step_rate": 5,
                    "lr_range_test_staircase": True,
                },
            }
        },
        {"schedule.lr_decay_style": "range-test", "schedule.lr_range_test_min_lr": 1e-4}
        | {"schedule.lr_range_test_step_size": 20, "schedule.lr_range_test_step_rate": 5}
        | {"schedule.lr_range_test_staircase": True},
    ),
    (
        {
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_type": "linear", "warmup_num_steps": 3},
            }
        },
        {"schedule.lr_decay_style": "constant", "schedule.lr_warmup_iters": 3}
        | {"schedule.lr_warmup_style": "linear"},
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1}}},
        {"schedule.lr_warmup_style": "log", "schedule.lr_warmup_iters": 2},
    ),
    (
        {
            "optimizer": {"params": {"lr": 1e-3}},
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": {
                    "warmup_min_ratio": 0.5,
                    "cos_min_ratio": 0.25,
                    "warmup_num_steps": 4,
                    "total_num_steps": 30,
                },
            },
        },
        {"schedule.lr": 1e-3, "schedule.lr_warmup_init": 5e-4, "schedule.min_lr": 2.5e-4}
        | {"schedule.lr_decay_style": "cosine", "schedule.lr_decay_iters": 30}
        | {"schedule.lr_warmup_iters": 4, "schedule.lr_warmup_style": "log"},
    ),
]
