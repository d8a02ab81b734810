"""Does the engine do on a CUDA card what it does on the CPU? Every test here carries ``@pytest.mark.gpu``."""
