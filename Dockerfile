# The proxy in a container: docs/deployment.md. It runs as a user without privileges, works with a read-only
# root file system, and writes to its data folder only.

FROM python:3.13-slim-trixie AS build

ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1

# The environment has no pip: the image's own pip installs into it and stays behind in this stage.
RUN python -m venv --without-pip /opt/palimpsest

WORKDIR /build
COPY requirements.txt requirements-otel.txt requirements-psycopg.txt ./
RUN pip --python /opt/palimpsest/bin/python install --require-hashes --only-binary :all: \
    --requirement requirements.txt --requirement requirements-otel.txt --requirement requirements-psycopg.txt

# The program comes last, so that a change in it does not reinstall the dependencies.
COPY pyproject.toml README.md LICENSE THIRD_PARTY.md ./
COPY migrations migrations
COPY proxy proxy
RUN pip --python /opt/palimpsest/bin/python install --no-deps --no-build-isolation .


FROM python:3.13-slim-trixie

LABEL org.opencontainers.image.title="Palimpsest" \
      org.opencontainers.image.description="A reverse proxy for LLM APIs that keeps everything and sends less." \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="MIT"

# The ids are fixed, so that the owner of a mounted folder can be set.
RUN groupadd --gid 10001 palimpsest \
    && useradd --uid 10001 --gid 10001 --home-dir /var/lib/palimpsest --shell /usr/sbin/nologin palimpsest \
    && install --directory --owner 10001 --group 10001 --mode 0700 /var/lib/palimpsest \
    && install --directory /etc/palimpsest

COPY --from=build /opt/palimpsest /opt/palimpsest

# The proxy does not start on this address without authentication.
ENV PATH=/opt/palimpsest/bin:$PATH \
    PALIMPSEST_SERVER__HOST=0.0.0.0 \
    PALIMPSEST_SERVER__PORT=8080 \
    PALIMPSEST_STORE__URL=sqlite:////var/lib/palimpsest/palimpsest.db \
    PALIMPSEST_STORE__SPOOL=/var/lib/palimpsest/spool

# Checks that the program runs, and compiles the standard library, which the base image does not.
RUN palimpsest schema > /dev/null
ENV PYTHONDONTWRITEBYTECODE=1

USER 10001:10001
# config.yaml is read from here. Mount a folder, not the file: a mounted file is not seen to change.
WORKDIR /etc/palimpsest
VOLUME /var/lib/palimpsest
EXPOSE 8080

# Whether the process serves, and not /readyz: what restarts a container, or sends it no requests, because the database
# is away would end running streams, and the requests that are served without it.
# With http.client, which ignores HTTP_PROXY, and without the program, which takes a second to import.
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-Ic", "import http.client as h, os; c = h.HTTPConnection('127.0.0.1', int(os.environ['PALIMPSEST_SERVER__PORT']), timeout=4); c.request('GET', '/healthz'); raise SystemExit(c.getresponse().status != 200)"]

ENTRYPOINT ["palimpsest"]
CMD ["serve"]
