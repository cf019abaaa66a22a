"""The process behind `TransformersEngine`: the handlers of `transformers serve` in an app of ours. Run as a script.

`transformers serve` itself names a model by its folder, loads any other one it is asked for, and passes over
what it cannot do. This app serves one folder under one name, and says no to the rest.
"""

from __future__ import annotations

import json
import socket
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from jinja2.exceptions import TemplateError
from transformers import GenerationConfig
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import GenerationState

READY = "caddie-engine-ready"
"""Starts the line that tells the port, on standard output."""

_MAX_BODY = 16 * 2**20
_MAX_SECONDS = 600.0


class _Pinned:
    """What both handlers do our way: the model's name, what cannot be done, and what does not fit."""

    served: str
    context: int
    model_manager: Any

    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request(body)  # type: ignore[misc]
        refused = {
            "logprobs": body.get("logprobs") or body.get("top_logprobs"),
            "n above 1": body.get("n") not in (None, 1),
            "response_format": body.get("response_format") not in (None, {"type": "text"}),
        }
        if names := [name for name, asked in refused.items() if asked]:
            raise HTTPException(400, f"the transformers engine cannot do {', '.join(names)}; llama.cpp and vLLM can")
        messages = body.get("messages", [{"role": "user"}])
        if not messages or not all(isinstance(entry, dict) and entry.get("role") for entry in messages):
            raise HTTPException(400, "messages must be a list of objects with a role, one at least")

    def _resolve_model(self, body: dict[str, Any]) -> tuple[str, Any, Any]:
        if body.get("model") not in (None, self.served):
            raise HTTPException(404, f"the model {body['model']!r} is not served here; {self.served!r} is")
        (loaded,) = self.model_manager.loaded_models.values()
        return self.served, loaded.model, loaded.processor

    def _fit(self, inputs: Mapping[str, Any], generation: Any) -> None:
        used = int(inputs["input_ids"].shape[-1])
        if used >= self.context:
            raise HTTPException(400, f"the prompt has {used} tokens; the maximum context length is {self.context}")
        if generation.max_new_tokens < 1:
            raise HTTPException(400, "max_tokens must be at least 1")
        generation.max_new_tokens = min(generation.max_new_tokens, self.context - used)

    def _streaming(self, *request: Any, **named: Any) -> Any:
        self._fit(request[4], request[5])
        return super()._streaming(*request, **named)  # type: ignore[misc]

    async def _non_streaming(self, *request: Any, **named: Any) -> Any:
        self._fit(request[4], request[5])
        return await super()._non_streaming(*request, **named)  # type: ignore[misc]


class _Chat(_Pinned, ChatCompletionHandler):  # type: ignore[misc]
    pass


class _Completion(_Pinned, CompletionHandler):  # type: ignore[misc]
    pass


def load(settings: Mapping[str, Any]) -> tuple[ModelManager, int]:
    """The model on the CPU, set to plain sampling; and the tokens of one request."""
    torch.set_num_threads(settings["threads"])
    manager = ModelManager(device="cpu", force_model=settings["path"])
    (loaded,) = manager.loaded_models.values()
    tokenizer = getattr(loaded.processor, "tokenizer", loaded.processor)
    for holder in {id(loaded.processor): loaded.processor, id(tokenizer): tokenizer}.values():
        if settings["chat_template"]:
            holder.chat_template = settings["chat_template"]
    if not getattr(loaded.processor, "chat_template", None):
        raise ValueError("the tokenizer has no chat template; pass one")
    own = loaded.model.generation_config
    # A request that names no sampling gets OpenAI's (temperature 1, nothing cut off), as in training; without
    # `do_sample` its temperature would be passed over.
    loaded.model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        max_time=_MAX_SECONDS,
        bos_token_id=own.bos_token_id,
        eos_token_id=own.eos_token_id,
        pad_token_id=own.pad_token_id if own.pad_token_id is not None else tokenizer.pad_token_id,
    )
    limits = [settings["context"], getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)]
    return manager, min([limit for limit in limits if limit] or [sys.maxsize])


def build(manager: ModelManager, model_id: str, context: int) -> FastAPI:
    app = FastAPI(openapi_url=None)
    state = GenerationState()
    chat, completion = _Chat(manager, state), _Completion(manager, state)
    for handler in (chat, completion):
        handler.served, handler.context = model_id, context
    entry = {"id": model_id, "object": "model", "created": int(time.time()), "owned_by": "caddie"}

    @app.post("/v1/chat/completions")
    async def chat_completions(body: dict[str, Any]) -> Any:
        return await chat.handle_request(body, f"chatcmpl-{uuid.uuid4().hex}")

    @app.post("/v1/completions")
    async def completions(body: dict[str, Any]) -> Any:
        return await completion.handle_request(body, f"cmpl-{uuid.uuid4().hex}")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{**entry, "max_model_len": context}]}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.middleware("http")
    async def bounded(request: Request, following: Callable[[Request], Awaitable[Response]]) -> Response:
        length = request.headers.get("content-length", "")
        if request.method == "POST" and not length.isdecimal():
            return _error(411, "the request must tell its length")
        if length.isdecimal() and int(length) > _MAX_BODY:
            return _error(413, f"the request is larger than {_MAX_BODY} bytes")
        return await following(request)

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> Response:
        return _error(error.status_code, str(error.detail))

    @app.exception_handler(TemplateError)
    async def untold(_: Request, error: TemplateError) -> Response:
        return _error(400, f"the model's chat template does not take these messages: {error}")

    @app.exception_handler(ValueError)
    async def unusable(_: Request, error: ValueError) -> Response:
        # transformers checks a request's numbers where it uses them.
        return _error(400, f"transformers refuses the request: {error}")

    return app


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error", "code": status}}, status)


def main() -> None:
    settings = json.loads(sys.argv[1])
    try:
        family = socket.AF_INET6 if ":" in settings["host"] else socket.AF_INET
        listener = socket.create_server((settings["host"], settings["port"]), family=family)
        manager, context = load(settings)
    except Exception as error:  # noqa: BLE001 - whatever transformers cannot load ends in one line
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")
    app = build(manager, settings["model_id"], context)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
    print(f"\n{READY} {listener.getsockname()[1]}", flush=True)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
