"""The process behind `LlamaCppEngine`: xllamacpp's server with our settings. Started as a script.

It is a process of its own because xllamacpp holds Python's lock while it loads a model and while it stops, and
because stopping it with a request under way waits for that request's client: inside an application, which may be
that client, the two would wait for each other for ever. Here the end of the process is the end of the server.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping
from typing import Any

READY = "caddie-engine-ready"
"""Starts the line that tells the port, on standard output."""

_PROMPT_CACHE_MIB = 1024
_ERRORS_ONLY = 1


def parameters(settings: Mapping[str, Any]) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = settings["path"]
    # A set of names: a string would be taken letter by letter.
    params.model_alias = {settings["model_id"]}
    params.hostnames, params.port = [settings["host"]], settings["port"]
    # llama.cpp divides the context among the slots.
    params.n_ctx, params.n_parallel = settings["context"] * settings["slots"], settings["slots"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    if settings["chat_template"]:
        params.chat_template = settings["chat_template"]
    params.verbosity = _ERRORS_ONLY
    # Its default is 8 GiB of main memory.
    params.cache_ram_mib = _PROMPT_CACHE_MIB
    # A request that names no sampling gets OpenAI's (temperature 1, nothing cut off), as in training.
    sampling = params.sampling
    sampling.temp, sampling.top_p, sampling.top_k, sampling.min_p = 1.0, 1.0, 0, 0.0
    # No web page may use the server through its visitor's browser; and nothing tells what others asked.
    params.cors_origins, params.cors_credentials, params.cors_origins_explicit = "", False, True
    params.ui = params.endpoint_slots = params.endpoint_props = params.endpoint_metrics = False
    return params


def main() -> None:
    import xllamacpp

    try:
        server = xllamacpp.Server(parameters(json.loads(sys.argv[1])))
    except RuntimeError:
        sys.exit(1)  # the reasons are on standard error already
    print(f"\n{READY} {server.listening_address.rsplit(':', 1)[1]}", flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
