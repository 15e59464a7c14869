"""Policy synchronisation: a thin factor and a few integers travel, the receiver rebuilds the rest.

`update` is the object and its one `apply`; `receiver` holds an engine's weights and its version
rules; `journal` keeps base and updates on disk; `mapping` knows fused and tensor-parallel layouts.
"""
