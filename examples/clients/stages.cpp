// Exported stages by hand, in C++ with ONNX Runtime and nlohmann's json.hpp alone: every stage's answer until time is up.
//
// g++ -std=c++17 stages.cpp -I ORT/include -L ORT/lib -lonnxruntime -o stages     // ORT: a release of ONNX Runtime, unpacked
// ./stages FOLDER SECONDS < pixels     // float32, normalised, in the order C,H,W; prints "stage class" lines

#include <algorithm>
#include <chrono>
#include <fstream>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <onnxruntime_cxx_api.h>

int main(int, char** words) {
  const std::string folder = words[1];
  const auto manifest = nlohmann::json::parse(std::ifstream(folder + "/manifest.json"));
  std::string pixels{std::istreambuf_iterator<char>(std::cin), {}};
  std::vector<int64_t> shape = manifest["network"]["shape"];
  shape.insert(shape.begin(), 1);
  Ort::Env env;
  std::vector<Ort::Session> sessions;
  for (const auto& stage : manifest["stages"])
    sessions.emplace_back(env, (folder + "/" + stage["file"].get<std::string>()).c_str(), Ort::SessionOptions{});
  const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  std::map<std::string, Ort::Value> values;
  values["input"] = Ort::Value::CreateTensor(memory, reinterpret_cast<float*>(pixels.data()), pixels.size() / 4, shape.data(), 4);
  const auto began = std::chrono::steady_clock::now();
  for (const auto& stage : manifest["stages"]) {
    auto& session = sessions[stage["stage"].get<int>() - 1];
    Ort::IoBinding binding(session);
    for (const std::string name : stage["takes"]) binding.BindInput(name.c_str(), values[name]);
    binding.BindOutput("logits", memory);
    for (const std::string name : stage["gives"]) binding.BindOutput(name.c_str(), memory);
    session.Run(Ort::RunOptions{}, binding);
    const auto names = binding.GetOutputNames();
    auto given = binding.GetOutputValues();
    for (size_t i = 0; i < names.size(); ++i) values[names[i]] = std::move(given[i]);
    const float* logits = values["logits"].GetTensorData<float>();
    const size_t count = values["logits"].GetTensorTypeAndShapeInfo().GetElementCount();
    std::cout << stage["stage"] << " " << std::max_element(logits, logits + count) - logits << std::endl;
    if (std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count() >= std::stod(words[2])) break;
  }
}
