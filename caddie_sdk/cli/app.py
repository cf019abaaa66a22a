"""The commands and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from caddie_sdk.cli.choices import Choices
from caddie_sdk.cli.traces import traces_app

app = typer.Typer(
    name="caddie",
    help="Let an LLM agent consult a trained critic while it works.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)
app.add_typer(traces_app, name="traces", rich_help_panel=None)

Model = Annotated[
    str, typer.Option(help="Model name at --base-url, or `embedded` for the small model that comes along.")
]
BaseUrl = Annotated[str | None, typer.Option(help="OpenAI-compatible server of the agent's model.")]
ApiKeyEnv = Annotated[str, typer.Option(help="Environment variable that holds the API key.")]
CriticKeyEnv = Annotated[
    str | None, typer.Option(help="Environment variable that holds the API key of the critic's server.")
]
CriticRef = Annotated[
    str, typer.Option("--critic", help="off, self, embedded, the URL of a served critic, or a checkpoint to serve.")
]
Pack = Annotated[
    str | None, typer.Option(help="Critic pack; by default the one the critic was trained with, else `search`.")
]
Protocol = Annotated[
    str,
    typer.Option(
        help="When to consult: off, self-call, fixed:K[,K], windowed:MIN-MAX, probabilistic:ALPHA, "
        "guarded:TOOL,TOOL;repeats=N"
    ),
]
Format = Annotated[
    str | None,
    typer.Option("--format", help="tool-calls, caddie or cafe; by default caddie for embedded, else tool-calls."),
]
MaxSteps = Annotated[int, typer.Option(min=1, help="Agent steps per question; consultations are not steps.")]
MinSearches = Annotated[int, typer.Option(min=0, help="Steps before an answer is accepted.")]
MaxUses = Annotated[int, typer.Option(min=0, help="Consultations per question.")]
Timeout = Annotated[float, typer.Option(help="Seconds one consultation may take.")]
Temperature = Annotated[
    float | None, typer.Option(help="Sampling temperature; by default 0 for embedded, else the server's.")
]
Seed = Annotated[int, typer.Option(help="Seed of the protocol and of sampling.")]
AllowMismatch = Annotated[bool, typer.Option("--allow-mismatch", help="Go on when pack and checkpoint do not match.")]


@app.command()
def ask(
    question: Annotated[str | None, typer.Argument(help="The question; leave it out with --musique.")] = None,
    passages: Annotated[Path | None, typer.Option(help="Passages to search: .jsonl, .json, .txt or .md.")] = None,
    musique: Annotated[
        Path | None, typer.Option(help="A MuSiQue file: its questions, each over its own passages.")
    ] = None,
    id: Annotated[str | None, typer.Option("--id", help="Only the question with this id.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many questions.")] = None,
    model: Model = "embedded",
    base_url: BaseUrl = None,
    api_key_env: ApiKeyEnv = "OPENAI_API_KEY",
    critic: CriticRef = "self",
    critic_key_env: CriticKeyEnv = None,
    pack: Pack = None,
    protocol: Protocol = "self-call",
    format: Format = None,
    max_steps: MaxSteps = 8,
    min_searches: MinSearches = 1,
    max_uses: MaxUses = 3,
    timeout: Timeout = 60.0,
    temperature: Temperature = None,
    seed: Seed = 0,
    allow_mismatch: AllowMismatch = False,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Write one JSON record per question to this file.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the records in --json and skip their questions.")
    ] = False,
) -> None:
    """Answer questions by searching passages, with a critic at the agent's side."""
    from caddie_sdk.cli.ask import ask_questions, load_questions

    choices = Choices(
        model=model, base_url=base_url, api_key_env=api_key_env, critic=critic, critic_key_env=critic_key_env,
        pack=pack, protocol=protocol, format=format, max_steps=max_steps, min_searches=min_searches,
        max_uses=max_uses, timeout=timeout, temperature=temperature, seed=seed, allow_mismatch=allow_mismatch,
    )  # fmt: skip
    questions = load_questions(question, passages=passages, musique=musique, id=id, limit=limit)
    ask_questions(questions, choices, json_out=json_out, resume=resume)


@app.command()
def demo(
    protocol: Protocol = "guarded:;repeats=2",
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Write one JSON record per question to this file.")
    ] = None,
) -> None:
    """Run a handful of two-hop questions with the embedded model, live."""
    from caddie_sdk.cli.demo import run_demo

    run_demo(protocol=protocol, json_out=json_out)


@app.command()
def serve(
    ref: Annotated[str, typer.Argument(help="A .gguf file, a Hugging Face folder, or `embedded`.")],
    pack: Pack = None,
    host: Annotated[
        str, typer.Option(help="Address to bind; anything but loopback is open to the network.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 0,
    engine: Annotated[str, typer.Option(help="auto, llama.cpp, transformers or vllm.")] = "auto",
    context: Annotated[
        int | None,
        typer.Option(min=256, help="Context per request, in tokens; by default the model's own, llama.cpp 8192."),
    ] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, help="Requests worked on at once (llama.cpp, by default 2; vllm).")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Compute threads (llama.cpp, transformers).")] = None,
    allow_mismatch: AllowMismatch = False,
) -> None:
    """Serve a critic checkpoint with an OpenAI-compatible API and print its URL."""
    from caddie_critics.serve import run_forever

    raise typer.Exit(
        run_forever(
            ref,
            pack=pack,
            host=host,
            port=port,
            engine=engine,
            context=context,
            slots=slots,
            threads=threads,
            allow_mismatch=allow_mismatch,
        )
    )


@app.command()
def proxy(
    upstream: Annotated[str, typer.Option(help="Base URL of the model server that requests go to.")],
    critic: Annotated[
        str, typer.Option(help="off, embedded, the URL of a served critic, or a checkpoint to serve.")
    ] = "embedded",
    critic_key_env: CriticKeyEnv = None,
    pack: Pack = None,
    protocol: Protocol = "self-call",
    max_uses: Annotated[int, typer.Option(min=0, help="Consultations per user turn.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=1, help="Length of one critique, in tokens.")] = 512,
    timeout: Timeout = 60.0,
    host: Annotated[
        str, typer.Option(help="Address to bind; anything but loopback is open to the network.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 0,
    ledger: Annotated[
        Path | None, typer.Option(help="SQLite file for turns with consultations; by default they are kept in memory.")
    ] = None,
    advice: Annotated[bool, typer.Option("--advice", help="Put critiques into the answers' field `caddie`.")] = False,
    traces: Annotated[
        Path | None, typer.Option(help="Write finished trajectories to this file; it holds conversations, redacted.")
    ] = None,
    max_body_mb: Annotated[int, typer.Option(min=1, help="Largest request body, in MiB.")] = 32,
    idle: Annotated[float, typer.Option(min=0.1, help="Seconds without a byte from the upstream.")] = 600.0,
    total: Annotated[float, typer.Option(min=0.1, help="Seconds for a whole request.")] = 3600.0,
    drain: Annotated[int, typer.Option(min=0, help="Seconds that streams may still take at shutdown.")] = 60,
    allow_mismatch: AllowMismatch = False,
) -> None:
    """Run an OpenAI-compatible proxy that gives every agent behind it a critic."""
    from caddie_sdk.cli.proxy import ProxyChoices, run_proxy

    chosen = ProxyChoices(
        upstream=upstream, host=host, port=port, protocol=protocol, max_uses=max_uses, max_tokens=max_tokens,
        timeout=timeout, ledger=ledger, advice=advice, traces=traces, max_body_mb=max_body_mb, idle=idle, total=total,
        drain=drain,
    )  # fmt: skip
    run_proxy(chosen, Choices(critic=critic, critic_key_env=critic_key_env, pack=pack, allow_mismatch=allow_mismatch))


@app.command()
def mcp(
    critic: Annotated[
        str | None,
        typer.Option(
            help="off, embedded, the URL of a served critic, or a checkpoint to serve; by default the proxy's own, "
            "else embedded."
        ),
    ] = None,
    critic_key_env: CriticKeyEnv = None,
    pack: Pack = None,
    proxy: Annotated[
        str | None, typer.Option(help="URL of a running `caddie proxy`, whose sessions can be named.")
    ] = None,
    proxy_key_env: Annotated[
        str | None, typer.Option(help="Environment variable that holds a bearer token for --proxy.")
    ] = None,
    transport: Annotated[str, typer.Option(help="stdio or http.")] = "stdio",
    host: Annotated[
        str, typer.Option(help="Address to bind; anything but loopback is open to the network.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port for http; 0 takes a free one.")] = 0,
    max_uses: Annotated[int, typer.Option(min=0, help="Consultations per user turn.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=1, help="Length of one critique, in tokens.")] = 512,
    timeout: Timeout = 60.0,
    max_body_mb: Annotated[int, typer.Option(min=1, help="Largest conversation, in MiB.")] = 4,
    allow_mismatch: AllowMismatch = False,
) -> None:
    """Run an MCP server whose tool call_critic advises on a conversation."""
    from caddie_sdk.cli.mcp import McpChoices, run_mcp

    chosen = McpChoices(
        proxy=proxy, proxy_key_env=proxy_key_env, transport=transport, host=host, port=port,
        max_uses=max_uses, max_tokens=max_tokens, timeout=timeout, max_body_mb=max_body_mb,
    )  # fmt: skip
    ref = critic or ("off" if proxy else "embedded")
    run_mcp(chosen, Choices(critic=ref, critic_key_env=critic_key_env, pack=pack, allow_mismatch=allow_mismatch))


@app.command()
def retrieve(
    corpus: Annotated[Path, typer.Option(help="JSONL file, a passage a line: id and contents, or id, title and text.")],
    mode: Annotated[str, typer.Option(help="bm25 by words, dense by meaning, fused both.")] = "bm25",
    host: Annotated[
        str, typer.Option(help="Address to bind; anything but loopback is open to the network.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 0,
    top_k: Annotated[int, typer.Option("--topk", min=1, help="Passages a query, where a request does not say.")] = 3,
    cache_dir: Annotated[
        Path | None, typer.Option(help="Folder for indexes; by default caddie/indexes in the user's cache folder.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Embedding model for dense and fused: a folder, or a name on the hub.")
    ] = None,
    query_prompt: Annotated[str | None, typer.Option(help="Put before each query, for models trained so.")] = None,
    passage_prompt: Annotated[str | None, typer.Option(help="Put before each passage, for models trained so.")] = None,
    device: Annotated[str | None, typer.Option(help="Torch device of the embedding model.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Searches at once; by default one a processor.")] = None,
    max_body_mb: Annotated[int, typer.Option(min=1, help="Largest request body, in MiB.")] = 4,
    max_queries: Annotated[int, typer.Option(min=1, help="Most queries in one request.")] = 1024,
    max_top_k: Annotated[int, typer.Option("--max-topk", min=1, help="Most passages a query.")] = 100,
    total: Annotated[float, typer.Option(min=0.1, help="Seconds for a whole request.")] = 300.0,
    drain: Annotated[int, typer.Option(min=0, help="Seconds that requests may still take at shutdown.")] = 10,
) -> None:
    """Serve search over a local corpus in Search-R1's shape (POST /retrieve) and print its URL."""
    from caddie_sdk.cli.retrieve import RetrieveChoices, run_retrieve

    chosen = RetrieveChoices(
        corpus=corpus, mode=mode, host=host, port=port, top_k=top_k, cache_dir=cache_dir, model=model,
        query_prompt=query_prompt, passage_prompt=passage_prompt, device=device, threads=threads,
        max_body_mb=max_body_mb, max_queries=max_queries, max_top_k=max_top_k, total=total, drain=drain,
    )  # fmt: skip
    run_retrieve(chosen)


@app.command()
def packs() -> None:
    """List the critic packs that come along, with their hashes."""
    from caddie_critics import list_packs, load_pack

    for name in list_packs():
        loaded = load_pack(name)
        typer.echo(f"{name:<12} {loaded.hash}  {loaded.description}")
