// Decodes the text of a kernel into instructions.
#pragma once

#include "ptx/parse_statement.h"

namespace ptxrun {

struct Parser : StatementParser {
  using StatementParser::StatementParser;

  void directive(const std::string& s, int line) {
    std::vector<std::string> words;
    std::string word;
    for (char c : s) {
      if (isspace(static_cast<unsigned char>(c))) {
        if (!word.empty()) words.push_back(word);
        word.clear();
      } else {
        word += c;
      }
    }
    if (!word.empty()) words.push_back(word);
    if (words[0] == ".reg") {
      const Ty t = type_of(words[1].substr(1));
      if (t == NO_TYPE) bad_ptx(k, line, s);
      const bool wide = t != PRED && bytes_of(t) == 8;
      std::string names;
      for (size_t i = 2; i < words.size(); ++i) names += words[i];
      for (const std::string& name : split(names, ',')) {
        const size_t open = name.find('<');
        if (open == std::string::npos) {
          declare(name, wide);
        } else {
          const int count = atoi(name.c_str() + open + 1);
          for (int i = 0; i < count; ++i) declare(name.substr(0, open) + std::to_string(i), wide);
        }
      }
    } else if (words[0] == ".shared") {
      shared_variable(words, line);
    } else if (words[0] == ".pragma" || words[0] == ".loc" || words[0] == ".file") {
    } else {
      bad_ptx(k, line, "directive " + s);
    }
  }

  void run() {
    scopes.emplace_back();
    // parameters
    const std::string& t = k.text;
    size_t open = t.find('(');
    size_t brace = t.find('{');
    size_t at = 0;
    if (open != std::string::npos && open < brace) {
      size_t close = t.find(')', open);
      // The list has no nested parentheses.
      for (const auto& p : split_raw(t.substr(open + 1, close - open - 1))) {
        u32 align = 0;
        Ty ty = NO_TYPE;
        std::string name;
        std::vector<std::string> words;
        std::string word;
        for (char c : p + " ") {
          if (isspace(static_cast<unsigned char>(c))) {
            if (!word.empty()) words.push_back(word);
            word.clear();
          } else {
            word += c;
          }
        }
        for (size_t i = 0; i < words.size(); ++i) {
          if (words[i] == ".align") align = static_cast<u32>(atoi(words[i + 1].c_str()));
          if (words[i][0] == '.' && type_of(words[i].substr(1)) != NO_TYPE) ty = type_of(words[i].substr(1));
        }
        name = words.back();
        u32 count = 1;
        const size_t bracket = name.find('[');
        if (bracket != std::string::npos) {
          count = static_cast<u32>(atoi(name.c_str() + bracket + 1));
          name = name.substr(0, bracket);
        }
        const u32 unit = static_cast<u32>(bytes_of(ty));
        align = std::max(align, unit);
        const u32 offset = (k.param_bytes + align - 1) / align * align;
        k.params.push_back({name, offset, unit * count});
        symbols[name] = kParamBase + offset;
        k.param_bytes = offset + unit * count;
      }
    }
    const size_t maxntid = t.find(".maxntid");
    if (maxntid != std::string::npos && maxntid < brace) k.max_threads = atoi(t.c_str() + maxntid + 8);
    // body
    at = brace;
    int line = k.first_line + static_cast<int>(std::count(t.begin(), t.begin() + static_cast<long>(at), '\n'));
    int depth = 0;
    std::string s;
    int start_line = line;
    int operand_depth = 0;
    for (; at < t.size(); ++at) {
      const char c = t[at];
      if (c == '\n') ++line;
      if (c == '/' && t[at + 1] == '/') {
        while (at < t.size() && t[at] != '\n') ++at;
        ++line;
        continue;
      }
      const bool blank = s.find_first_not_of(" \t\r\n") == std::string::npos;
      if (blank && c == '{') {
        ++depth;
        scopes.emplace_back();
        s.clear();
        continue;
      }
      if (blank && c == '}') {
        scopes.pop_back();
        s.clear();
        if (--depth == 0) break;
        continue;
      }
      if (blank && isspace(static_cast<unsigned char>(c))) continue;
      if (blank) {
        s.clear();
        start_line = line;
      }
      if (c == '{') ++operand_depth;
      if (c == '}') --operand_depth;
      if (c == ':' && operand_depth == 0 && s[0] == '$') {
        labels[s] = static_cast<int>(k.code.size());
        s.clear();
        continue;
      }
      if (c == ';') {
        if (s[0] == '.')
          directive(s, start_line);
        else
          statement(s, start_line);
        s.clear();
        continue;
      }
      if (c == '\n' && s.compare(0, 4, ".loc") == 0) {
        s.clear();
        continue;
      }
      s += c;
    }
    for (auto& [index, label] : fixups) {
      auto it = labels.find(label);
      if (it == labels.end()) bad_ptx(k, k.code[static_cast<size_t>(index)].line, "label " + label);
      k.code[static_cast<size_t>(index)].target = it->second;
    }
    Instr end;
    end.op = RET;
    end.text = "(end)";
    k.code.push_back(end);
    k.warp_count.assign(k.code.size(), 0);
    k.lane_count.assign(k.code.size(), 0);
    k.file_size = (k.file_size + 63) / 64 * 64;
    k.parsed = true;
  }
  static std::vector<std::string> split_raw(const std::string& s) {
    std::vector<std::string> out;
    std::string part;
    for (char c : s) {
      if (c == ',') {
        out.push_back(part);
        part.clear();
      } else {
        part += c;
      }
    }
    if (part.find_first_not_of(" \t\r\n") != std::string::npos) out.push_back(part);
    return out;
  }
};

}  // namespace ptxrun
