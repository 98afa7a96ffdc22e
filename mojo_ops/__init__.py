"""Mojo sources of the custom ops (see README.md in this folder)."""
