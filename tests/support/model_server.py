"""A real model server: llama.cpp's own, in this process, with a model of random numbers.

It is the same as `llama-server`, reached over HTTP on its own port. The package `xllamacpp` provides it. It is
not part of the development environment: `make test-model` installs it.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.support.random_model import write_random_model

CONTEXT: Final = 512
"""Size of its context window in tokens."""

MODEL: Final = "random"
"""The model's name."""


@contextmanager
def model_server(folder: Path) -> Generator[str]:
    """Create a model in `folder` and serve it; yield the base URL of the API."""
    from xllamacpp import CommonParams, Server  # noqa: PLC0415 - a hundred megabytes, for whoever asks for it

    file = folder / "random.gguf"
    write_random_model(file)
    settings = CommonParams()
    settings.model.path = str(file)
    settings.model_alias = {MODEL}
    settings.n_ctx = CONTEXT
    settings.n_parallel = 1  # one conversation at a time, so that its prompt cache is deterministic
    settings.hostnames = ["127.0.0.1"]
    settings.port = 0
    settings.n_gpu_layers = 0
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    settings.ui = settings.warmup = settings.fit_params = False
    settings.verbosity = -1
    server = Server(settings)
    try:
        yield f"{server.listening_address}/v1"
    finally:
        del server  # its destructor stops it
