"""Looking inside a mixture-of-experts model: what its routers do with text, and what can be read from it."""
