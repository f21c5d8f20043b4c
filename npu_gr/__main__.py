"""`python -m npu_gr` is `npu-gr`."""

from npu_gr.cli.main import main

if __name__ == "__main__":
    main()
