"""Hold what test files share: tiny models, a small Hub, the contract of every architecture, naive references."""
