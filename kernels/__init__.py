"""What is computed: the KDA and MLA kernels of Kimi K3 as pure functions of explicit tensors.

A kernel knows tensors, slot indices and lengths. It never hears of requests, prefixes or layers.
Every fast form stands beside a token-by-token form that also runs in float64: in `reference.py`,
for the affine view `affine.token_map`.

Dimension letters, the same in every shape comment, einsum string and test id:

    B  rows of a batch (one row = one sequence or one piece of it)
    N  tokens of a packed batch; row r owns tokens query_start[r] .. query_start[r+1]
    T  tokens of one row                    S  rows an attention query may see (context + T)
    H  heads                                C  tokens of one kernel chunk
    K  key width of a head                  V  value width of a head
    D  channels of the short convolution    W  its width in tokens (D = H*(2K+V) in a KDA layer)
    E  exports of one call                  L  latent width of an MLA row (kv_lora_rank)
    R  shared "rope" width of an MLA row (never rotated in K3)

Symbols follow the mathematics: q, k, v, g (log decay, <= 0), beta (write strength), S (recurrent
state, stored value-first as [H, V, K]), o (read-out before norm and output gate).
"""
