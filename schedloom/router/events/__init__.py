"""What engines tell of their KV blocks, and what is known from it."""
