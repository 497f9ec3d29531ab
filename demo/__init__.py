"""`make demo`: a real vLLM answers long prompts without prefilling them, in a new process."""
