"""From requests to tokens: tokenizers, sampling and the loops that drive the model."""
