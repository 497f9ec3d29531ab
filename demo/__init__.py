"""`make demo`: a new vLLM process loads the KV of long prompts instead of prefilling them."""
