"""Export a base and its adapters to the programs that serve them elsewhere: vLLM, llama.cpp."""
