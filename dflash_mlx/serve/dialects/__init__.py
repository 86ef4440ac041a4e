"""What vendors' clients send and expect: OpenAI's completions, and the dialects of coding agents."""
