# The whole project on Python 3.12, as an ordinary user, without compilers or a CUDA toolkit.
#
#   docker build -t megatron .                                          for NVIDIA GPUs
#   docker build -t megatron:cpu --target cpu .                         for CPUs, a third of the size
#   docker build -t megatron:server --target server .                   the text generation server
#   docker build -t megatron:server-cpu --target server --build-arg ON=cpu .
#
#   docker run --rm --gpus all -v "$PWD/runs:/workspace/runs" megatron megatron pretrain --help
#   docker run --rm -p 5000:5000 -v "$PWD/runs/demo/checkpoints:/checkpoints:ro" \
#       -v "$PWD/token:/token:ro" megatron:server
#
# A mounted folder must belong to user 1000; otherwise, give --user "$(id -u)" -e HOME=/tmp.
ARG ON=gpu

# ---- what is installed, with the tools to install it ----------------------------------------------
FROM python:3.12-slim AS build
RUN python -m venv /venv
ENV PATH=/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /workspace
# Dependencies first: this layer is reused until the pins change.
COPY requirements.txt .

FROM build AS build-gpu
RUN pip install -r requirements.txt
COPY . .
# The NVRTC that PyTorch installs compiles the kernels here, for A100, H100/H200, and B200. Kernels
# for other GPUs are compiled in the first run.
ARG MEGATRON_CUDA_ARCHS="sm_80 sm_90a sm_100a"
RUN pip install --no-deps -e .

FROM build AS build-cpu
# PyTorch's own package index has builds without CUDA, which are a fifth as large:
# --build-arg INDEX=URL.
ARG INDEX=
RUN pip install ${INDEX:+--extra-index-url "$INDEX"} -r requirements.txt
COPY . .
RUN pip install --no-deps -e .

# ---- what runs ------------------------------------------------------------------------------------
FROM python:3.12-slim AS slim
RUN useradd --create-home --uid 1000 megatron
ENV PATH=/venv/bin:$PATH
WORKDIR /workspace
CMD ["megatron", "--help"]

FROM slim AS cpu
COPY --from=build-cpu /venv /venv
COPY --from=build-cpu --chown=megatron /workspace /workspace
USER 1000

FROM slim AS gpu
COPY --from=build-gpu /venv /venv
COPY --from=build-gpu --chown=megatron /workspace /workspace
USER 1000

# hadolint ignore=DL3006
FROM ${ON} AS server
EXPOSE 5000
# Loading a model may take minutes. After that, three failures in a row make the container unhealthy.
HEALTHCHECK --start-period=10m --interval=30s --timeout=10s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:5000/health', timeout=9)"]
ENTRYPOINT ["python", "tools/run_text_generation_server.py", "--host", "0.0.0.0", "--port", "5000"]
CMD ["--load", "/checkpoints", "--auth-token-file", "/token"]

# The last stage is the one that is built by default.
FROM gpu
