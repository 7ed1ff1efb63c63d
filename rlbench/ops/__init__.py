"""Operations: what is computed and what must not change it. One folder an op; knows no engine."""
