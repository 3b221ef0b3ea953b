"""The layers of Kimi K3. Each has one forward that serves training, prefill and decode."""
