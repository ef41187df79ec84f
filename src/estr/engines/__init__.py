"""Engines: what draws the tokens.

local       continuous batching over a transformers causal LM, no asyncio
in_process  the Engine protocol over it, in the same process
process     the Engine protocol over it, in a process of its own
"""
