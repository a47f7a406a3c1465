// Reads the text of extract.py, prints the names of the kernels that it can decode, and reports the others on stderr.
#include "sass/load.h"

using namespace ptxrun;

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  try {
    load_sass(argv[1]);
  } catch (Stop) {
    return 1;
  }
  for (const auto& [name, kernel] : sass_kernels()) printf("%s %u\n", name.c_str(), kernel->params_at);
}
