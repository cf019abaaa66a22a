"""Start the support bot: `python -m examples.support_bot --base-url http://127.0.0.1:8000/v1`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from decimal import Decimal, InvalidOperation
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if __package__ in (None, ""):  # started as `python examples/support_bot/app.py`
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from caddie_sdk.errors import CaddieError, ConfigError, MissingExtra, ServeError

if TYPE_CHECKING:
    from caddie_critics import EndpointCritic
    from caddie_sdk.endpoint import ChatEndpoint
    from examples.support_bot.desk import Desk
    from examples.support_bot.mailroom import Mailroom
    from examples.support_bot.store import Store

HOST = "127.0.0.1"
STAFF_TOKEN = "SUPPORT_STAFF_TOKEN"
_DRAIN_SECONDS = 3
_DEFAULT_KEY = "OPENAI_API_KEY"

log = logging.getLogger("support_bot")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run until interrupted. What is wrong is one line on standard error, and exit status 1."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    try:
        run(options)
    except CaddieError as error:
        print(f"support_bot: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(1) from None


def run(options: argparse.Namespace) -> None:
    """Serve.

    Raises:
        ConfigError, ServeError: with one line on what to mend.
    """
    from examples.support_bot.store import Store, check_file

    # What can be wrong comes first, and what takes long to load last.
    _check_extras()
    model, critic = _model(options), _critic(options)
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(contextlib.closing(_listen(options.port)))
        check_file(options.db)
        stack.enter_context(_only_one(options.db))
        store = Store(options.db)
        check_file(_beside(options.db, ".threads"))
        _serve(options, listening, store, model, critic)


def _check_extras() -> None:
    for module, feature, extra in (
        ("uvicorn", "the support bot's server", "proxy"),
        ("starlette", "the support bot's server", "proxy"),
        ("langgraph.checkpoint.sqlite", "a thread that survives restarts", "sqlite"),
    ):
        if find_spec(module) is None:
            raise MissingExtra(feature, extra)


def _serve(
    options: argparse.Namespace,
    listening: socket.socket,
    store: Store,
    model: ChatEndpoint,
    critic: EndpointCritic | None,
) -> None:
    import uvicorn

    from examples.support_bot.mailroom import Mailroom
    from examples.support_bot.web import create_app

    token = os.environ.get(STAFF_TOKEN, "").strip() or secrets.token_urlsafe(18)
    mailroom = Mailroom(store)
    desks: list[Desk] = []

    @contextlib.asynccontextmanager
    async def open_desk() -> AsyncIterator[Desk]:
        async with _desk(options, store, mailroom, model, critic) as desk:
            desks.append(desk)
            _announce(listening, token)
            yield desk

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            for desk in desks:
                desk.leave()
            await super().shutdown(sockets)

    config = uvicorn.Config(
        create_app(open_desk, mailroom, token),
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_DRAIN_SECONDS,
    )
    # uvicorn raises the signal again once it has drained; by default that would end in a traceback.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    Server(config).run(sockets=[listening])


def _leave(number: int, frame: Any) -> NoReturn:
    raise SystemExit(0)


@contextlib.asynccontextmanager
async def _desk(
    options: argparse.Namespace, store: Store, mailroom: Mailroom, model: ChatEndpoint, critic: EndpointCritic | None
) -> AsyncIterator[Desk]:
    from examples.support_bot.agent import create_support_agent
    from examples.support_bot.desk import Desk
    from examples.support_bot.shop import Shop
    from examples.support_bot.threads import ThreadSaver
    from examples.support_bot.tools import shop_tools

    tools = shop_tools(Shop(store), mailroom, approve_above=options.approve_above)
    async with ThreadSaver.from_conn_string(str(_beside(options.db, ".threads"))) as saver:
        assert isinstance(saver, ThreadSaver)  # its constructor is typed as the base's
        agent = create_support_agent(
            model, tools, critic=critic, checkpointer=saver, critic_seconds=options.critic_timeout
        )
        desk = Desk(agent, mailroom, tidy=saver.tidy)
        await desk.start()
        looking = asyncio.create_task(_look(model, critic))
        yield desk
        looking.cancel()
        await desk.stop()


async def _look(model: ChatEndpoint, critic: EndpointCritic | None) -> None:
    """Say at once what is not there. Nothing waits for it: servers may come up later."""
    try:
        await model.acheck()
    except CaddieError as error:
        log.warning("the model: %s. Customers' messages wait until it answers", error)
    try:
        if critic is not None:
            await critic.acheck()
    except CaddieError as error:
        log.warning("the critic: %s. The bot goes on without advice until it answers", error)


# ------------------------------------------------------------------ what was chosen


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"support_bot: {message}; --help lists the options\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="support_bot", description="A customer-support bot with a web page for an online shop.")
    parser.add_argument("--base-url", required=True, metavar="URL", help="OpenAI-compatible server of the model")
    parser.add_argument("--model", metavar="NAME", help="model name; by default the first one the server lists")
    parser.add_argument("--api-key-env", default=_DEFAULT_KEY, metavar="VAR", help="variable with the model's key")
    parser.add_argument("--critic", default="off", metavar="URL|off", help="server of the critic")
    parser.add_argument("--critic-key-env", metavar="VAR", help="variable with the critic's key")
    parser.add_argument("--critic-timeout", type=_seconds, default=20.0, metavar="S", help="seconds for advice")
    parser.add_argument("--approve-above", type=_cents, default=20_000, metavar="AMOUNT",
                        help="returns worth more wait for a colleague (200.00)")  # fmt: skip
    parser.add_argument("--db", type=Path, default=Path("support.db"), metavar="PATH", help="the shop's database")
    parser.add_argument("--port", type=_port, default=8020, help=f"port on {HOST}; 0 takes a free one")
    return parser


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 3600:
        raise argparse.ArgumentTypeError(f"{text} is not a time between 0 and 3600 seconds")
    return value


def _cents(text: str) -> int:
    try:
        amount = Decimal(text)
    except InvalidOperation:
        amount = Decimal("nan")
    if not amount.is_finite() or not 0 <= amount < 10**9 or amount != round(amount, 2):
        raise argparse.ArgumentTypeError(f"{text} is not an amount such as 200.00")
    return int(amount * 100)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"{text} is not a port, 0 to 65535")
    return int(text)


def _model(options: argparse.Namespace) -> ChatEndpoint:
    from caddie_sdk.endpoint import ChatEndpoint

    return ChatEndpoint(options.base_url, options.model, api_key=_key("--api-key-env", options.api_key_env))


def _critic(options: argparse.Namespace) -> EndpointCritic | None:
    if options.critic == "off":
        return None
    if not options.critic.startswith(("http://", "https://")):
        raise ConfigError(f"--critic {options.critic}: neither off nor a URL that starts with http://")
    from caddie_critics import EndpointCritic

    return EndpointCritic(options.critic, pack="support", api_key=_key("--critic-key-env", options.critic_key_env))


def _key(option: str, variable: str | None) -> str | None:
    key = os.environ.get(variable) if variable else None
    if key is None and variable not in (None, _DEFAULT_KEY):
        raise ConfigError(f"{option} {variable}: there is no such environment variable")
    return key


# ------------------------------------------------------------------ the process


def _listen(port: int) -> socket.socket:
    # With the protocol spelled out asyncio turns Nagle's algorithm off; it would cost 40 ms an answer.
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((HOST, port))
        listening.listen(256)
    except OSError as error:
        listening.close()
        raise ServeError(f"cannot listen on {HOST}:{port}: {error.strerror or error}; choose another --port") from error
    return listening


@contextlib.contextmanager
def _only_one(db: Path) -> Any:
    """Two bots on one database would both work on the same threads. The lock ends with the process, however it ends."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield
        return
    try:
        file = _beside(db, ".lock").open("a")
    except OSError as error:
        raise ConfigError(f"--db {db}: {error.strerror}; give a file in a folder that can be written") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"--db {db} is in use by another support bot; stop it, or give another file") from error
        yield


def _beside(db: Path, ending: str) -> Path:
    return db.with_name(db.name + ending)


def _announce(listening: socket.socket, token: str) -> None:
    url = f"http://{HOST}:{listening.getsockname()[1]}"
    print(f"customers  {url}/\nstaff      {url}/staff#{token}", flush=True)


if __name__ == "__main__":
    main()
