"""The only package that knows kinds of arrays and the devices they lie on.

An array of the caller's (NumPy, torch, JAX, MAX, DLPack) becomes a *view* of the same memory: NumPy's on the host,
torch's on a GPU. `devices.device_of` says which `ArrayDevice` a call's arrays share; the rest of the package handles
views through it and through what NumPy and torch have in common, and never asks where they lie.
"""
