"""The half of a KV connector that every engine would write again."""
