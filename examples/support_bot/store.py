"""The SQLite file behind the bot: opened, created with sample data where it is new, and written in transactions."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from caddie_sdk.errors import ConfigError

_HERE = Path(__file__).parent
_FORMAT = 1
_BUSY_SECONDS = 10.0


class Store:
    """A database file. Every call opens its own connection, so it may be used from any thread.

    Raises:
        ConfigError: the file cannot be opened, or holds something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with closing(self._connect()) as connection:
                self._prepare(connection)
        except sqlite3.Error as error:
            raise ConfigError(f"--db {path}: {error}; give another file, or a folder that can be written") from error

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection to read from; all reads see one state."""
        with closing(self._connect()) as connection:
            connection.execute("BEGIN")
            yield connection

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction: committed at the end of the block, taken back if it raises."""
        with closing(self._connect()) as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=_BUSY_SECONDS, isolation_level=None)
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA foreign_keys = ON")
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        known = connection.execute("PRAGMA user_version").fetchone()[0]
        if known == _FORMAT:
            return
        if known or connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
            raise ConfigError(f"--db {self.path} is a database of something else; give another file")
        connection.execute("PRAGMA journal_mode = WAL")
        schema, seed = ((_HERE / name).read_text("utf-8") for name in ("schema.sql", "seed.sql"))
        # All of it or nothing: a half-made shop would be refused at the next start.
        connection.executescript(f"BEGIN IMMEDIATE; {schema} {seed} PRAGMA user_version = {_FORMAT}; COMMIT;")


def check_file(path: Path) -> None:
    """Make sure that a file, if it is there, is a database that can be read.

    Raises:
        ConfigError: it is not.
    """
    if not path.exists():
        return
    try:
        with closing(sqlite3.connect(path, timeout=_BUSY_SECONDS)) as connection:
            connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    except sqlite3.Error as error:
        raise ConfigError(f"--db: {path} cannot be used: {error}; give another file") from error
