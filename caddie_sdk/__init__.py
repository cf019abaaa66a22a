"""Caddie: let any LLM agent consult a trained critic while it works."""
