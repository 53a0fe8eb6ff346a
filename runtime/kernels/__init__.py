"""The decision on a GPU: three Triton launches a layer, for tensors that never leave it. Needs torch and triton.

``decision.DeviceDecision`` is what callers use; ``summarise``, ``decide``, ``budget`` and ``reroute`` are the kernels.
``DESIGN.md`` beside this file says why they look as they do.
"""
