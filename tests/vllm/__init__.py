"""Tests that run the vLLM engine: `make test-vllm`, in an environment of its own."""
