"""The chapter bf16."""
