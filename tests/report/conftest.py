"""The browser that these tests look at pages with."""

from support.reports import chromium

__all__ = ["chromium"]
