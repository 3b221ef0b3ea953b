"""SGLang's manager: a radix tree of latent pages with sparse checkpoints of the KDA state."""
