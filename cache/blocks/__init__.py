"""vLLM's manager: hashed blocks, state blocks, one joint look-up over any number of groups."""
