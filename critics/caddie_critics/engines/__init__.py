"""Engines: model servers for the checkpoints at hand, each a supervised process on this machine.

| engine              | checkpoint         | where      | grammar | cached tokens reported |
|---------------------|--------------------|------------|---------|------------------------|
| `LlamaCppEngine`    | GGUF file          | CPU (GPU)  | yes     | yes                    |
| `TransformersEngine`| safetensors folder | CPU        | no      | no                     |
| `VllmEngine`        | safetensors folder | CUDA       | yes     | yes                    |

    with LlamaCppEngine("critic.gguf", model_id="critic") as engine:
        print(engine.url)            # for an OpenAI client, or ChatEndpoint(engine.url, grammar=engine.grammar)

The servers' packages are loaded in those processes only; importing this one loads none of them.
"""

from __future__ import annotations

from caddie_critics.engines.base import Engine
from caddie_critics.engines.llamacpp import LlamaCppEngine
from caddie_critics.engines.transformers_engine import TransformersEngine
from caddie_critics.engines.vllm_engine import VllmEngine

__all__ = ["Engine", "LlamaCppEngine", "TransformersEngine", "VllmEngine"]
