# The whole project on Python 3.12; trains on NVIDIA GPUs with `docker run --gpus all`, because the
# torch of requirements.txt brings its CUDA libraries. Needs no compiler.
#
#   docker build -t megatron .
#   docker run --rm -it -v "$PWD/runs:/workspace/runs" megatron python tools/demo.py --out runs/demo
FROM python:3.12-slim

WORKDIR /workspace

# Dependencies first: this layer is reused until the pins change.
COPY requirements.txt .
RUN pip install --no-cache-dir -r requirements.txt

COPY . .
RUN pip install --no-cache-dir -e .

CMD ["python", "pretrain_gpt.py", "--help"]
