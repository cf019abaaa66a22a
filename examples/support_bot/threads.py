"""Where threads are kept: LangGraph's SQLite checkpointer, and nothing kept longer than it is needed."""

from __future__ import annotations

from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver


class ThreadSaver(AsyncSqliteSaver):
    """Keeps threads that go on for years.

    Each step of the graph stores the whole state, so the file would grow with the square of a conversation: 100 MiB
    after 60 turns. What a finished turn went through is never returned to; its end is all that the next one needs.
    """

    async def tidy(self, thread: str) -> None:
        """Drop all checkpoints of a thread but the latest."""
        await self.setup()
        async with self.lock:
            for table in ("writes", "checkpoints"):
                await self.conn.execute(
                    f"DELETE FROM {table} WHERE thread_id = ?1 AND checkpoint_ns = '' AND checkpoint_id <"
                    " (SELECT max(checkpoint_id) FROM checkpoints WHERE thread_id = ?1 AND checkpoint_ns = '')",
                    (thread,),
                )
            await self.conn.commit()
