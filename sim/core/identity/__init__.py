"""Identity of tokens: content spans, block keys and sharing scopes."""
