/*
cusim_launch.h -- kernel launches with the signatures of the toolkit's header under nvcc, but typed:
arguments are copied at the launch, and pointers among them are checked.
*/
#ifndef CUSIM_LAUNCH_H
#define CUSIM_LAUNCH_H

template <class T> inline void cusim_check_argument(const T& value, int argument, const void* kernel) {
    if constexpr (std::is_pointer<T>::value && !std::is_function<std::remove_pointer_t<T>>::value) {
        cusim_check_kernel_pointer((const void*)value, argument, kernel);
    } else if constexpr (std::is_same<T, CUtensorMap>::value) {
        cusim_check_tensor_map(&value, argument, kernel);
    }
}

template <typename... P, typename... A>
inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(P...),
                                      A&&... arguments) {
    static_assert(sizeof...(P) == sizeof...(A), "number of kernel arguments");
    const std::tuple<std::decay_t<P>...> copies(std::forward<A>(arguments)...);
    int i = 0;
    std::apply([&](auto&... value) { (cusim_check_argument(value, i++, (const void*)kernel), ...); }, copies);
    (void)i;
    std::function<void()> body = [kernel, copies]() { std::apply(kernel, copies); };
    return cusim_launch(config, (const void*)kernel, &body);
}

template <class T>
inline cudaError_t cudaFuncSetAttribute(T* kernel, cudaFuncAttribute attribute, int value) {
    return ::cudaFuncSetAttribute((const void*)kernel, attribute, value);
}
template <class T> inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, T* kernel) {
    return ::cudaFuncGetAttributes(attributes, (const void*)kernel);
}
template <class T>
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, T* kernel, int threads,
                                                                 size_t dynamic_bytes) {
    return ::cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, (const void*)kernel, threads,
                                                           dynamic_bytes);
}

#endif
