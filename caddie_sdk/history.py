"""The append-only tree of messages with an active path (SPEC §4).

A plain conversation is a tree with one branch. `fork()` shares the prefix and costs O(1), which serves the
G x N branching of training; `backtrack()` moves the active path back to an earlier node and keeps the suffix
in the tree, out of context, which serves LoongReflect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from caddie_sdk.errors import SessionError
from caddie_sdk.messages import Message

Kind = Literal["system", "task", "action", "observation", "advice", "request", "notice"]
"""What a node is: `request` is a consultation that nobody's model wrote (a protocol forced it); `notice` is a
word of the session itself, such as the allowed forms after a malformed reply."""


@dataclass(slots=True, eq=False)
class Node:
    """One message in the tree. Never changed once made; children point to parents, never the other way.

    Not a frozen dataclass, because a loaded history makes many of them and frozen ones take five times as long.

    Attributes:
        id: number of the node, unique in its history, in order of appending.
        step: index of the agent step the node belongs to.
        meta: facts the session noted when it stored the message (parsed action, consultation number, error).
    """

    id: int
    parent: Node | None
    message: Message
    kind: Kind
    step: int
    meta: Mapping[str, Any] = field(default_factory=dict)


class History:
    """An append-only tree with an active path."""

    __slots__ = ("_archived", "_head", "_next_id", "_path")

    def __init__(self) -> None:
        self._head: Node | None = None
        self._archived: tuple[Node, ...] = ()
        self._next_id = 0
        self._path: list[Node] | None = []

    def append(self, message: Message, kind: Kind, step: int, meta: Mapping[str, Any] | None = None) -> Node:
        """Add a message at the end of the active path."""
        node = Node(self._next_id, self._head, message, kind, step, meta or {})
        self._next_id += 1
        self._head = node
        if self._path is not None:
            self._path.append(node)
        return node

    @property
    def head(self) -> Node | None:
        """The last node of the active path."""
        return self._head

    @property
    def archived(self) -> tuple[Node, ...]:
        """The ends of branches that were left by `backtrack`, oldest first."""
        return self._archived

    def path(self) -> list[Node]:
        """The active path, root first. The list must not be changed by the caller."""
        if self._path is None:
            self._path = list(reversed(list(_ancestors(self._head))))
        return self._path

    def messages(self) -> list[Message]:
        """The messages of the active path."""
        return [node.message for node in self.path()]

    def fork(self) -> History:
        """A history that shares everything so far and grows on its own. O(1)."""
        child = History()
        child._head, child._archived, child._next_id, child._path = (
            self._head,
            self._archived,
            self._next_id,
            None,
        )
        return child

    def backtrack(self, node_id: int) -> Node:
        """Make an earlier node of the active path its end; the suffix is archived, not deleted.

        Raises:
            SessionError: the node is not on the active path.
        """
        target = next((node for node in _ancestors(self._head) if node.id == node_id), None)
        if target is None or self._head is None:
            raise SessionError(f"cannot backtrack: node {node_id} is not on the active path")
        if target is not self._head:
            self._archived = (*self._archived, self._head)
            self._head, self._path = target, None
        return target

    def dump(self) -> dict[str, Any]:
        """The whole tree as plain JSON. Messages are shared, not copied: treat them as frozen."""
        nodes: dict[int, Node] = {}
        for tip in (self._head, *self._archived):
            for node in _ancestors(tip):
                if node.id in nodes:
                    break
                nodes[node.id] = node
        return {
            "head": None if self._head is None else self._head.id,
            "archived": [node.id for node in self._archived],
            "next_id": self._next_id,
            "nodes": [_dump_node(nodes[key]) for key in sorted(nodes)],
        }

    @classmethod
    def load(cls, data: Mapping[str, Any]) -> History:
        """Rebuild a history from `dump()`.

        Raises:
            SessionError: the data is not a dump of a history.
        """
        history = cls()
        nodes: dict[int, Node] = {}
        try:
            for item in data["nodes"]:
                parent = None if item["parent"] is None else nodes[item["parent"]]
                nodes[item["id"]] = Node(
                    item["id"], parent, item["message"], item["kind"], item["step"], item.get("meta") or {}
                )
            history._head = None if data["head"] is None else nodes[data["head"]]
            history._archived = tuple(nodes[key] for key in data["archived"])
            history._next_id = data["next_id"]
        except (AttributeError, KeyError, TypeError) as error:
            raise SessionError(f"not a history dump: {error!r} is missing or of the wrong type") from None
        history._path = None
        return history


def _ancestors(node: Node | None) -> Iterator[Node]:
    while node is not None:
        yield node
        node = node.parent


def _dump_node(node: Node) -> dict[str, Any]:
    item: dict[str, Any] = {
        "id": node.id,
        "parent": None if node.parent is None else node.parent.id,
        "kind": node.kind,
        "step": node.step,
        "message": node.message,
    }
    if node.meta:
        item["meta"] = dict(node.meta)
    return item
