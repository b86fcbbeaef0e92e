# mha2gqa with CUDA, for one machine with NVIDIA GPUs:
#   docker build -t mha2gqa .
#   docker run --rm --gpus all --ipc=host -v "$PWD:/data" -v hf-cache:/hf mha2gqa plan MODEL --groups 8
# Several GPUs: --entrypoint torchrun … mha2gqa --nproc_per_node 8 -m mha2gqa uptrain …
ARG BASE=pytorch/pytorch:2.8.0-cuda12.8-cudnn9-runtime
FROM ${BASE}

ENV HF_HOME=/hf PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY mha2gqa mha2gqa
# torch stays the one of the image, which fits its CUDA.
RUN python -c "import torch; print(f'torch=={torch.__version__}')" > constraints.txt \
    && python -m pip install -c constraints.txt '.[trackers,qlora]'
# Runs as a user without rights; a fresh volume takes over the owner of the folder that it is mounted on.
RUN useradd --create-home user && mkdir -p /data /hf && chown user /data /hf
USER user
WORKDIR /data
ENTRYPOINT ["mha2gqa"]
