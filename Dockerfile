# lorakit, to train and to serve in a container. For GPUs:  docker build -t lorakit .
# For CPUs:  docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu -t lorakit:cpu .
#   docker run --rm -v "$PWD:/work" lorakit train recipe.yaml
#   docker run --rm -v "$PWD:/work" -p 8000:8000 lorakit serve BASE --adapter a=adapters/a --host 0.0.0.0
ARG PYTHON=3.11
FROM python:${PYTHON}-slim

ARG TORCH_INDEX=https://pypi.org/simple
ARG EXTRAS=serve,structured,deepspeed,quant,gguf
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /opt/lorakit
COPY constraints.txt ./
# alone, because only torch has an index for CPUs, and so that a change of lorakit does not bring it again
RUN pip install --index-url "$TORCH_INDEX" "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY recipes recipes
COPY lorakit lorakit
RUN pip install -c constraints.txt ".[$EXTRAS]"

RUN useradd --create-home lorakit
USER lorakit
# the folder that `lorakit launch` mounts if no other is named, as docs/deployment.yaml does: recipes, rows, bases, outputs;
# caches too, so that a container that is started anew reads nothing twice
WORKDIR /work
ENV XDG_CACHE_HOME=/work/.cache HF_HOME=/work/.cache/huggingface
EXPOSE 8000
ENTRYPOINT ["lorakit"]
CMD ["--help"]
