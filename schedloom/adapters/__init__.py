"""The only code that imports an engine or an accelerator package."""
