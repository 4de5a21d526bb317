"""Model families over our kernels, attention and KV interfaces, and where their weights come from."""
