# The API server with TensorRT-LLM 1.2.1, for machines with GPUs. The library comes with NVIDIA's image; installing it by pip there would
# replace the torch that it was built for. Build from the repository's root, and run with the flags that the library wants:
#   docker build -f infra/images/tensorrt.Dockerfile -t weir-tensorrt .
#   docker run --gpus all --ipc host --ulimit memlock=-1 --ulimit stack=67108864 \
#     -e WEIR_DATABASE_URL=… -e WEIR_MODELS=llama=/models/llama -v /models:/models:ro weir-tensorrt
# Pin the base image by digest with --build-arg TENSORRT_IMAGE=nvcr.io/nvidia/tensorrt-llm/release:1.2.1@sha256:…
ARG TENSORRT_IMAGE=nvcr.io/nvidia/tensorrt-llm/release:1.2.1

FROM ${TENSORRT_IMAGE}

ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 WEIR_HOME=/var/lib/weir WEIR_ENGINE=tensorrt
WORKDIR /srv/weir

COPY requirements/constraints.txt requirements/constraints.txt
COPY pyproject.toml README.md ./
COPY sdk/python/pyproject.toml sdk/python/README.md sdk/python/
COPY sdk/python/src sdk/python/src
COPY proto proto
COPY api api
COPY common common
COPY demo demo
COPY inference inference
COPY metering metering
COPY migrations migrations
COPY weir_commands weir_commands
# Not the extra `safety`: it needs a newer transformers than the library was built with. Whatever the image brings stays as it is, torch above all: its versions are constraints, and ours hold for the rest.
RUN pip freeze --exclude-editable | grep -E '^[A-Za-z0-9._-]+==' > image.txt \
    && python -c "names = {line.split('==')[0].lower().replace('_', '-') for line in open('image.txt')}; \
        print(*(line for line in open('requirements/constraints.txt') if line.split('==')[0].lower() not in names), sep='', end='')" > ours.txt \
    && pip install -c image.txt -c ours.txt -e sdk/python -e ".[otel,remote]"

RUN useradd --system --home-dir /var/lib/weir --create-home weir
USER weir
VOLUME /var/lib/weir
ENV WEIR_OPENAI_LISTEN=0.0.0.0:9443 WEIR_METRICS_LISTEN=0.0.0.0:10443
EXPOSE 8443 9443 10443
ENTRYPOINT ["weir"]
# Reachable from outside the container, so it wants WEIR_TLS_CERTIFICATE and WEIR_TLS_KEY, or WEIR_ALLOW_PLAINTEXT=1.
CMD ["serve", "--listen", "0.0.0.0:8443"]
