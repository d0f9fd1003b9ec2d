"""Triton kernels and their launchers.

A launcher has the signature of the reference, gets checked arguments and never reads values on the host.
"""
