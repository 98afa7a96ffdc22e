"""The server: one ASGI application on the engine (serve/README.md, docs/serving.md)."""
