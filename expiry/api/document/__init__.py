"""The API described, from the declarations that serve it: for machines (OpenAPI) and as a page to be read."""
