# The API server with TensorRT-LLM 1.2.1, for machines with GPUs. Build from the repository's root, and run with the flags that the library wants:
#   docker build -f infra/images/tensorrt.Dockerfile -t weir-tensorrt .
#   docker run --gpus all --ipc host --ulimit memlock=-1 --ulimit stack=67108864 \
#     -e WEIR_DATABASE_URL=… -e WEIR_MODELS=llama=/models/llama -v /models:/models:ro weir-tensorrt
# Pin the base image by digest with --build-arg TENSORRT_IMAGE=nvcr.io/nvidia/tensorrt-llm/release:1.2.1@sha256:…
ARG TENSORRT_IMAGE=nvcr.io/nvidia/tensorrt-llm/release:1.2.1

FROM ${TENSORRT_IMAGE} AS wheels

WORKDIR /srv/weir
COPY pyproject.toml README.md ./
COPY sdk/python/pyproject.toml sdk/python/README.md sdk/python/
COPY sdk/python/src sdk/python/src
COPY proto proto
COPY api api
COPY chaos chaos
COPY common common
COPY demo demo
COPY inference inference
COPY metering metering
COPY migrations migrations
COPY weir_commands weir_commands
# NVIDIA's image sets PIP_CONSTRAINT to its own versions. The server computes nothing here, so it has no torch.
RUN PIP_CONSTRAINT= python3 -m pip wheel --no-deps --wheel-dir /wheels sdk/python . \
    && python3 -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
        more = project['optional-dependencies']; \
        needed = [*project['dependencies'], *more['otel'], *more['remote'], *more['tensorrt']]; \
        print(*(each for each in needed if not each.startswith(('torch', 'weir-client'))), sep='\n')" > /wheels/server.txt

FROM ${TENSORRT_IMAGE}

ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 WEIR_HOME=/var/lib/weir WEIR_ENGINE=tensorrt
COPY requirements/constraints.txt /srv/constraints.txt
COPY --from=wheels /wheels /srv/wheels
# Two environments. The server's has the pinned versions and nothing of NVIDIA's. The worker's sees the packages of the image as they are,
# and has beside them Weir and the only package that the worker needs and the library does not bring.
RUN python3 -m venv --without-pip /srv/server \
    && PIP_CONSTRAINT= python3 -m pip --python /srv/server/bin/python install -c /srv/constraints.txt -r /srv/wheels/server.txt \
    && PIP_CONSTRAINT= python3 -m pip --python /srv/server/bin/python install --no-deps /srv/wheels/weir_client-*.whl /srv/wheels/weir_server-*.whl
RUN python3 -m venv --without-pip --system-site-packages /srv/worker \
    && PIP_CONSTRAINT= python3 -m pip --python /srv/worker/bin/python install --no-deps -c /srv/constraints.txt msgspec /srv/wheels/weir_server-*.whl
# A container is often run as root, which Open MPI refuses without these; the user below is not root.
ENV WEIR_TENSORRT_PYTHON=/srv/worker/bin/python OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

RUN useradd --system --home-dir /var/lib/weir --create-home weir
USER weir
VOLUME /var/lib/weir
ENV WEIR_OPENAI_LISTEN=0.0.0.0:9443 WEIR_METRICS_LISTEN=0.0.0.0:10443
EXPOSE 8443 9443 10443
ENTRYPOINT ["/srv/server/bin/weir"]
# Reachable from outside the container, so it wants WEIR_TLS_CERTIFICATE and WEIR_TLS_KEY, or WEIR_ALLOW_PLAINTEXT=1.
CMD ["serve", "--listen", "0.0.0.0:8443"]
