"""Tensor RPC: remote calls, remote references, distributed autograd."""
