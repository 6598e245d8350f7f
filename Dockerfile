# The proxy in a container; docs/deployment.md says how to run it. It runs as a user without rights, on a
# root file system that may be read-only, and writes to its data folder alone.

FROM python:3.13-slim-trixie AS build

ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1

# Without pip in it: the image's own installs from outside, and nothing of it gets into the next stage.
RUN python -m venv --without-pip /opt/palimpsest

WORKDIR /build
COPY requirements.txt requirements-psycopg.txt ./
RUN pip --python /opt/palimpsest/bin/python install --require-hashes --only-binary :all: \
    --requirement requirements.txt --requirement requirements-psycopg.txt

# The program comes last: a change of it installs nothing else again.
COPY pyproject.toml README.md LICENSE THIRD_PARTY.md ./
COPY migrations migrations
COPY proxy proxy
RUN pip --python /opt/palimpsest/bin/python install --no-deps --no-build-isolation .


FROM python:3.13-slim-trixie

LABEL org.opencontainers.image.title="Palimpsest" \
      org.opencontainers.image.description="A reverse proxy for the OpenAI Chat Completions API that keeps everything and sends less." \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="MIT"

# The numbers are fixed, so that whoever mounts a folder knows whose it must be.
RUN groupadd --gid 10001 palimpsest \
    && useradd --uid 10001 --gid 10001 --home-dir /var/lib/palimpsest --shell /usr/sbin/nologin palimpsest \
    && install --directory --owner 10001 --group 10001 --mode 0700 /var/lib/palimpsest \
    && install --directory /etc/palimpsest

COPY --from=build /opt/palimpsest /opt/palimpsest

# On another address than loopback it does not start without authentication, so this opens nothing.
ENV PATH=/opt/palimpsest/bin:$PATH \
    PALIMPSEST_SERVER__HOST=0.0.0.0 \
    PALIMPSEST_SERVER__PORT=8080 \
    PALIMPSEST_STORE__URL=sqlite:////var/lib/palimpsest/palimpsest.db

# Shows that the program runs here, and leaves the standard library compiled, which the base image is not.
RUN palimpsest schema > /dev/null
ENV PYTHONDONTWRITEBYTECODE=1

USER 10001:10001
# A config.yaml that is mounted here is read.
WORKDIR /etc/palimpsest
VOLUME /var/lib/palimpsest
EXPOSE 8080

# By http.client, which heeds no HTTP_PROXY, and without the program, whose import takes a second.
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-Ic", "import http.client as h, os; c = h.HTTPConnection('127.0.0.1', int(os.environ['PALIMPSEST_SERVER__PORT']), timeout=4); c.request('GET', '/readyz'); raise SystemExit(c.getresponse().status != 200)"]

ENTRYPOINT ["palimpsest"]
CMD ["serve"]
