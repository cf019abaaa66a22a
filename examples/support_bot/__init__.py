"""A customer-support agent for an online shop: LangGraph, SQLite, a critic before whatever cannot be undone."""
