"""What a program is told of the gateway by its environment, under every name that SDKs look for."""

from __future__ import annotations


def provider_environment(url: str, key: str, model: str) -> dict[str, str]:
    """Address, key and model of every provider's API, and Polar's own."""
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": model,
        "CODEX_API_KEY": key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_MODEL": model,
        "GOOGLE_GEMINI_BASE_URL": url,
        "GEMINI_API_KEY": key,
        "GOOGLE_API_KEY": key,
        "GOOGLE_GENERATIVE_AI_API_KEY": key,
        "GEMINI_MODEL": model,
        "POLAR_GATEWAY_URL": url,
        "POLAR_KEY": key,
        "POLAR_MODEL": model,
    }
